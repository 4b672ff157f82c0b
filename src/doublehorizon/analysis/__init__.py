"""What is measured on finished runs."""
