"""What went wrong because of something the user gave, told in one line."""


class UserError(ValueError):
    """A mistake that the user can mend. The message says what was given, what is needed and what to do."""
