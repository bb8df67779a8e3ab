"""A small HTTP/1.1 client, for the commands that talk to a server: `bench serve` and `top`.

Import the submodules. They need nothing beyond the standard library, and cost less a read than
a general client does.
"""
