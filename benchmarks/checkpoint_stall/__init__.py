"""How much saving a checkpoint slows down the steps around it, compared with DCP and torch.save."""
