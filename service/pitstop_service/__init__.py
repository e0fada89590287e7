"""The service: runs in, predictions out, over REST."""
