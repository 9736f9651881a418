"""A delivered message: what is known of it, what it carries, and how it comes back."""
