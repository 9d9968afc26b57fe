"""Carryover Drafting: train and serve drafters that recycle rejected states."""
