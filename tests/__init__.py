"""Tests of moedock."""
