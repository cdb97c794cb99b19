"""Shell text with which a droplet deletes itself."""

from __future__ import annotations

METADATA_ID = "curl -sf --retry 5 -m 20 http://169.254.169.254/metadata/v1/id"
MACHINE_ID = f"grep -xE '[0-9]+' /var/lib/cloud/data/instance-id || {METADATA_ID}"
"""cloud-init's instance id is the droplet's id, unless its data source is one that makes up another."""
SELF_DELETION = """\
command -v curl >/dev/null || exec poweroff
id=$({metadata_id})
case $id in '' | *[!0-9]*) exit 1 ;; esac
printf 'header = "Authorization: Bearer %s"\\n' {token} | curl -sf -m 30 -o /dev/null -X DELETE -K - {url}/v2/droplets/"$id" && sleep 60
"""  # noqa: E501
"""Is run again until the machine is gone: one that were off would be paid for as well, and try no more.

The token is on no command line.
"""
