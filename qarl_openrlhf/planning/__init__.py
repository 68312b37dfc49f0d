"""What a run will need, from the model's config.json and the flags alone: positions, kernels, bytes a GPU. Starts nothing."""
