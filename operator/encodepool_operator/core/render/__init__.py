"""What a pool's children look like: one builder per kind, pure, with sorted and complete results.

Every builder gives the whole object for server-side apply under one field manager, where a field
that is left out is a field that is deleted.
"""
