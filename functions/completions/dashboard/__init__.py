"""The dashboard: one page that shows an administrator what the usage API says."""
