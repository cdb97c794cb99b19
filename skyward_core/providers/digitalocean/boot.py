"""Shell text with which a droplet deletes itself."""

from __future__ import annotations

METADATA_ID = "curl -sf --retry 5 -m 20 http://169.254.169.254/metadata/v1/id"
MACHINE_ID = f"grep -xE '[0-9]+' /var/lib/cloud/data/instance-id || {METADATA_ID}"
"""cloud-init's instance id is the droplet's id, unless its data source makes up another id."""
SELF_DELETION = """\
command -v curl >/dev/null || exec poweroff
id=$({metadata_id})
case $id in '' | *[!0-9]*) exit 1 ;; esac
printf 'header = "Authorization: Bearer %s"\\n' {token} | curl -sf -m 30 -o /dev/null -X DELETE -K - {url}/v2/droplets/"$id" && sleep 60
"""  # noqa: E501
"""Runs again until the machine is gone. A machine that is off would be billed too, and could not try again.

The token is on no command line.
"""
