"""The models that devices run: configuration, decoder, weights, sampling, executables.

Import the submodules; this package loads nothing itself, so that importing it stays free
of torch.
"""
