"""Models on AWS Neuron: traced programs (NxD), and graphs of native PyTorch.

`program`, `sharding` and `artifact` say what is compiled and what lies on disk, `nxd` runs it;
`native` and `sampler` do both for native PyTorch. Nothing here is imported elsewhere at start.
"""
