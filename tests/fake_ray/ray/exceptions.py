class AuthenticationError(Exception):
    """The token is missing or wrong."""
