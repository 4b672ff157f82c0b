"""What can go wrong, told so that someone can act on it."""


class UserError(ValueError):
    """A mistake that the user can mend. The message says what was given, what is needed and what to do."""


class RunError(RuntimeError):
    """A run that could not go on for a reason outside of this package, such as an environment that raised."""
