"""What maintains this repository; no part of the package."""
