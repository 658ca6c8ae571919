"""What is made of several heads: ramps, several heads side by side, two layers, networks as attention, descent in context."""
