"""What saving a checkpoint costs the steps around it, against DCP and torch.save."""
