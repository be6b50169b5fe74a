"""tools/sft: trajectories of runs -> labels of two judges -> review -> rows -> a fine-tuned judge, or a benchmark."""
