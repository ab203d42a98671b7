"""What was found out, for people (rich renderables) and for programs (plain dicts): both read the same `Review`."""
