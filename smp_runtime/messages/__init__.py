"""What ranks say to each other, and how it travels."""
