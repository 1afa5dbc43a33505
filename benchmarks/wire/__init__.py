"""The bytes of gradients that ranks send, as the kernel counts them."""
