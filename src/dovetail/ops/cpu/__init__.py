"""Fused operators on the CPU: ranks compute straight into each other's memory."""
