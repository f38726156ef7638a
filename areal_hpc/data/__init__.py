"""Prompts: files and generated tasks (`datasets`), worked examples for a starting model (`worked`)."""
