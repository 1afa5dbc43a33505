"""The cost of saving a checkpoint for the steps around it, against DCP and torch.save."""
