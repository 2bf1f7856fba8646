"""Number formats: loss scaling, mixed precision and fp8."""
