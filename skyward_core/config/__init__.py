"""Settings of this user and this folder: what they say, where each value comes from, and a schema for editors."""
