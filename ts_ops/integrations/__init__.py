"""Adapters for other libraries; each module imports the library it is named after, and nothing here does."""
