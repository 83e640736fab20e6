"""The one form of each caller's ARN. The forms are IAM's: user guide, "IAM identifiers" and "assumed-role session"."""

from __future__ import annotations

import hashlib
import string

import pytest

from completions.web.auth import secret_digest
from completions.web.callers import EXAMPLE, caller_arn, caller_digest

ACCOUNT = "123456789012"


@pytest.mark.parametrize("partition", ["aws", "aws-cn", "aws-us-gov", "aws-iso-b"])
@pytest.mark.parametrize(
    "named",
    [
        f"sts::{ACCOUNT}:assumed-role/build/ada@example.com",
        f"sts::{ACCOUNT}:assumed-role/build/i-0123456789abcdef0",
        f"iam::{ACCOUNT}:role/build",
        f"iam::{ACCOUNT}:role/division/ci/build",
        f"iam::{ACCOUNT}:role/service-role/build",
    ],
)
def test_a_role_and_its_sessions_are_the_role_without_its_path(partition: str, named: str) -> None:
    assert caller_arn(f"arn:{partition}:{named}") == f"arn:{partition}:iam::{ACCOUNT}:role/build"


def test_a_single_sign_on_role_is_found_by_its_session() -> None:
    name = "AWSReservedSSO_Developer_0123456789abcdef"
    path = "aws-reserved/sso.amazonaws.com/eu-central-1"
    expected = f"arn:aws:iam::{ACCOUNT}:role/{name}"
    assert caller_arn(f"arn:aws:sts::{ACCOUNT}:assumed-role/{name}/ada@example.com") == expected
    assert caller_arn(f"arn:aws:iam::{ACCOUNT}:role/{path}/{name}") == expected


@pytest.mark.parametrize(
    "arn",
    [
        f"arn:aws:iam::{ACCOUNT}:user/ada",
        f"arn:aws:iam::{ACCOUNT}:user/division/team/ada",
        f"arn:aws-cn:iam::{ACCOUNT}:user/ada",
        f"arn:aws:iam::{ACCOUNT}:root",
        f"arn:aws-us-gov:sts::{ACCOUNT}:federated-user/ada",
        f"arn:aws:iam::{ACCOUNT}:role/{string.ascii_letters + '0+=,.@-_'}",
    ],
)
def test_other_callers_are_as_they_are(arn: str) -> None:
    assert caller_arn(arn) == arn


@pytest.mark.parametrize(
    "text",
    [
        "",
        "root",
        "arn:aws:iam::123456789012:role/",
        "arn:aws:iam::123456789012:role/*",
        "arn:aws:iam::*:role/build",
        "arn:aws:iam::12345678901:role/build",
        "arn:aws:iam::1234567890123:role/build",
        "arn:aws:iam::123456789012:group/all",
        "arn:aws:iam::123456789012:instance-profile/build",
        "arn:aws:iam::123456789012:root/",
        "arn:aws:iam:eu-central-1:123456789012:user/ada",
        "arn:aws:sts::123456789012:assumed-role/build",
        "arn:aws:sts::123456789012:assumed-role/build/",
        "arn:aws:sts::123456789012:assumed-role/build/a/b",
        "arn:other:iam::123456789012:user/ada",
        "ARN:aws:iam::123456789012:user/ada",
        "arn:aws:iam::123456789012:user/ada ",
        "arn:aws:iam::123456789012:user/ada\n",
        "arn:aws:iam::123456789012:user/a da",
        "arn:aws:iam::123456789012:user/ädä",
        "arn:aws:iam::١٢٣٤٥٦٧٨٩٠١٢:user/ada",
        "arn:aws:iam::123456789012:user/" + "x" * 100_000,
    ],
    ids=lambda text: repr(text)[:60],
)
def test_what_names_no_caller_has_no_form(text: str) -> None:
    assert caller_arn(text) is None


def test_a_form_stays_what_it_is() -> None:
    assert caller_arn(EXAMPLE) == EXAMPLE


def test_a_callers_digest_is_that_of_a_text_with_a_blank() -> None:
    arn = f"arn:aws:iam::{ACCOUNT}:role/build"
    assert caller_digest(arn) == hashlib.sha256(b"iam " + arn.encode()).hexdigest()
    assert caller_digest(arn) != secret_digest(arn)
