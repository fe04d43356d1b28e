"""Records in the shapes that trainers read. Imports only pydantic: usable inside a trainer's environment."""
