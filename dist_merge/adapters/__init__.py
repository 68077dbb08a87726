"""LoRA adapters in a checkpoint: which there are, how strong, folded or exported."""
