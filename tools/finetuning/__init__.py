"""coppice sft makes a fine-tuned judge or a benchmark: trajectories of runs -> labels of two judges
-> review -> rows or benchmark."""
