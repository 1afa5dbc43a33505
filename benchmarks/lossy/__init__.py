"""What is learned where not everything is sent."""
