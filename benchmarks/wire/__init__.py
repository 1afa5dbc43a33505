"""The bytes that ranks send for gradients, as counted by the kernel."""
