"""List prices of us-east-1 in dollars, with where each is from. To be checked before they are relied upon.

The project's reference notes of the date below give Lambda's price of waiting, DynamoDB's write units, and Managed
Instances' surcharge; API Gateway's, DynamoDB's read units and the instance's are those of the README's cost table.
None was read from AWS's price list for this run. What has no price here is not in the sums: logs, metrics, data
transfer, NAT and endpoints.
"""

from __future__ import annotations

from typing import Final

DATE: Final = "2026-11-30"
REGION: Final = "us-east-1"

LAMBDA_GB_SECOND_ARM: Final = 0.000_013_333_4
LAMBDA_MILLION_CALLS: Final = 0.20
MANAGED_SURCHARGE: Final = 0.15
"""Of EC2's own price."""
INSTANCE: Final = "c8g.xlarge"
INSTANCE_HOUR: Final = 0.159_5
INSTANCE_CPUS: Final = 4
MANAGED_LEAST_INSTANCES: Final = 3
GATEWAY_MILLION_CALLS: Final = 3.50
WRITE_UNITS_MILLION: Final = 0.625
READ_UNITS_MILLION: Final = 0.125

SOURCES: Final = {
    "Lambda, a GB-second on arm64": f"${LAMBDA_GB_SECOND_ARM:.10f}",
    "Lambda, a million calls": f"${LAMBDA_MILLION_CALLS:.2f}",
    f"EC2, {INSTANCE}, an hour, and Managed Instances' surcharge": f"${INSTANCE_HOUR:.4f} + {MANAGED_SURCHARGE:.0%}",
    "API Gateway REST, a million calls": f"${GATEWAY_MILLION_CALLS:.2f}",
    "DynamoDB on demand, a million write and read units": f"${WRITE_UNITS_MILLION:.3f}, ${READ_UNITS_MILLION:.3f}",
}
