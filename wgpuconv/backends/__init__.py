"""What runs plans. ``webgpu`` is built in; plugins bring others."""
