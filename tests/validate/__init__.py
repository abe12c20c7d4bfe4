"""Tests of the package `validate`."""
