"""coppice sft makes a fine-tuned judge: runs -> labels of two judges -> review -> rows."""
