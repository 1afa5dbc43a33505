"""The accuracy of training with compressed or delayed gradients."""
