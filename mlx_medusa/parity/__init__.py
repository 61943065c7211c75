"""Records of what the PyTorch oracle writes, and the check of MLX against them: ``python -m mlx_medusa.parity``."""
