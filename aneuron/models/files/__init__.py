"""How a model's files come to this machine: download, cache, conversion, file formats.

`aneuron.models.catalog` is the way in. Import the submodules; this package loads nothing
itself, so that finding a model that is there already stays fast.
"""
