"""Health: is the process alive, and can it serve?"""
