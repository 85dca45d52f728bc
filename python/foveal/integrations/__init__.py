"""Foveal inside other libraries; each module is imported by itself, since it imports that library."""
