"""One module for each kind of model: what a Hugging Face config of it means, and what its tensors are called."""
