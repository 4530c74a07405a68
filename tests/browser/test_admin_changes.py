"""Administration by the pages of the console: a real Chromium, the real API with a token."""

from collections.abc import Callable
from typing import Any

import httpx

from eyrie_api.access.keys import SecretKeys
from eyrie_api.contract.access import CreateMember, CreateWebhook
from eyrie_api.database.audit import Audit
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.database.webhooks import Webhooks
from eyrie_pipelines.processes import wait_until
from tests.browser.conftest import LOOKS, SHOTS, TOKEN, assert_accessible, key_in, signed_in, within

OpenPage = Callable[..., Any]
ISSUER = "https://issuer.example/realms/team"


def answering(page: Any, accepts: bool = True) -> list[str]:
    """Answers the page's questions; returns the list that they are added to."""
    asked: list[str] = []

    def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept() if accepts else dialog.dismiss()

    page.on("dialog", answer)
    return asked


def unexpected(faults: list[str], *refusals: str) -> list[str]:
    """Chromium logs each answer that refuses: the sign-in page is a 401."""
    return [one for one in faults if not any(status in one for status in ("401", *refusals))]


def reloaded(page: Any) -> Any:
    return page.expect_navigation(wait_until="load")


def test_a_key_is_created_used_copied_and_revoked(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    signed_in(page, url, key_in(database, "team", "admin"), "/console/admin")
    asked = answering(page)
    page.get_by_text("Create a key", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator("#new-key-name").focus()
    page.keyboard.type("nightly")
    page.locator("#new-key-role").select_option("operator")
    with page.expect_request(lambda one: one.method == "POST") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json == {"name": "nightly", "role": "operator"}
    page.locator("#key-made:focus code").wait_for()
    secret = page.locator("#key-made code").inner_text()
    whole = httpx.get(f"{url}/v1alpha1/whoami", headers={"authorization": f"Bearer {secret}"}, trust_env=False)
    assert whole.json()["roles"] == {"team": "operator"}
    page.get_by_role("button", name="Copy").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == secret
    assert secret not in page.url
    with reloaded(page):
        page.get_by_role("button", name="Done").click()
    assert secret not in page.content(), "it is shown once"
    row = page.locator("tr", has_text="nightly")
    row.locator("summary").focus()
    page.keyboard.press("Enter")
    with reloaded(page):
        row.get_by_role("button", name="Revoke").click()
    assert asked == ["Revoke the key nightly?"]
    page.locator("tr", has_text="nightly").locator(".badge", has_text="Revoked").wait_for()
    assert wait_until(lambda: httpx.get(f"{url}/v1alpha1/whoami", headers={"authorization": f"Bearer {secret}"},
                                        trust_env=False).status_code == 401, 60.0), "a server knows it for five seconds"
    assert page.locator("tr", has_text="nightly").get_by_role("button").count() == 0
    assert unexpected(faults) == []


def test_a_question_answered_with_no_changes_nothing(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "admin"), "/console/admin")
    asked = answering(page, accepts=False)
    row = page.locator("section[aria-labelledby=keys] tbody tr").first
    row.locator("summary").click()
    row.get_by_role("button", name="Revoke").click()
    row.get_by_role("button", name="Replace").click()
    assert len(asked) == 2
    (key,) = ApiKeys(database).list()
    assert key.revoked_at is None
    assert unexpected(faults) == []


def test_members_are_added_change_their_role_and_are_removed(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "admin"), "/console/admin/projects/team")
    answering(page)
    page.get_by_text("Add a member", exact=True).click()
    page.locator("#new-member-kind").select_option("group")
    page.locator("#new-member-value").fill("engineers")
    page.get_by_role("button", name="Add the member").click()
    refused = page.locator("#new-member-refused")
    refused.filter(has_text="no issuer").filter(has_text="hint: set EYRIE_OIDC_ISSUER").wait_for()
    page.locator("#new-member-value").fill("")
    page.get_by_role("button", name="Add the member").click()
    page.locator("#new-member-value-error").wait_for()
    assert page.locator("#new-member-value:focus").get_attribute("aria-invalid") == "true"
    page.locator("#new-member-value").fill("engineers")
    page.locator("#new-member-issuer").fill(ISSUER)
    with reloaded(page):
        page.get_by_role("button", name="Add the member").click()
    row = page.locator("tr", has_text="engineers")
    row.locator("summary").click()
    row.get_by_label("Role").select_option("operator")
    with reloaded(page):
        row.get_by_role("button", name="Change the role").click()
    (member,) = Projects(database).members("team")
    assert (member.kind, member.value, member.role, member.issuer) == ("group", "engineers", "operator", ISSUER)
    row.locator("summary").click()
    with reloaded(page):
        row.get_by_role("button", name="Remove").click()
    page.get_by_text("No member yet").wait_for()
    assert unexpected(faults, "422") == []


def test_a_project_is_created_and_its_quotas_are_set_and_lifted(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, TOKEN, "/console/admin")
    page.get_by_text("Create a project", exact=True).click()
    name = page.locator("#new-project-name")
    name.fill("No spaces")
    page.get_by_role("button", name="Create the project").click()
    page.locator("#new-project-name-error").wait_for()
    assert page.locator("#new-project-refused").inner_text() != ""
    name.fill("search")
    with reloaded(page):
        page.get_by_role("button", name="Create the project").click()
    page.get_by_role("link", name="search").click()
    page.locator("summary", has_text="Set the quotas").click()
    page.locator("#set-quotas-max_jobs").fill("many")
    page.get_by_role("button", name="Set the quotas").click()
    page.locator("#set-quotas-max_jobs-error", has_text="whole number").wait_for()
    for field, value in (("max_jobs", "4"), ("requests_per_minute", "600"), ("priority_classes", "batch, night")):
        page.locator(f"#set-quotas-{field}").fill(value)
    with reloaded(page):
        page.get_by_role("button", name="Set the quotas").click()
    quotas = Projects(database).get("search").quotas
    assert (quotas.max_jobs, quotas.max_gpus, quotas.requests_per_minute) == (4, None, 600)
    assert quotas.priority_classes == ("batch", "night")
    page.locator("summary", has_text="Set the quotas").click()
    assert page.locator("#set-quotas-priority_classes").input_value() == "batch, night"
    page.locator("#set-quotas-max_jobs").fill("")
    page.locator("#set-quotas-priority_classes").fill("[]")
    with reloaded(page):
        page.get_by_role("button", name="Set the quotas").click()
    quotas = Projects(database).get("search").quotas
    assert (quotas.max_jobs, quotas.priority_classes) == (None, ())
    done = {(one.actor, one.verb) for one in Audit(database).read().items if one.outcome == "done"}
    assert {("token", "project.create"), ("token", "project.quotas")} <= done
    assert unexpected(faults, "422") == []


def test_a_webhook_is_created_tested_given_another_secret_and_deleted(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "admin"), "/console/admin")
    answering(page)
    page.get_by_text("Create a webhook", exact=True).click()
    page.locator("#new-webhook-url").fill("http://127.0.0.1:9/arrivals")
    page.get_by_role("button", name="Create the webhook").click()
    page.locator("#new-webhook-refused", has_text="hint:").wait_for()
    page.locator("#new-webhook-url").fill("http://93.184.215.14/arrivals")
    for event in ("job.cancelled", "endpoint.drift"):
        page.get_by_label(event).uncheck()
    page.get_by_role("button", name="Create the webhook").click()
    made = page.locator("#webhook-made code")
    made.filter(has_text="whsec_").wait_for()
    first = made.inner_text()
    with reloaded(page):
        page.get_by_role("button", name="Done").click()
    (hook,) = Webhooks(database).list()
    assert hook.events == ("job.succeeded", "job.failed", "endpoint.promoted", "endpoint.rolled_back")
    row = page.locator("tr", has_text=hook.id)
    row.locator("summary").click()
    with reloaded(page):
        row.get_by_role("button", name="Test").click()
    (sent,) = Webhooks(database).deliveries(hook.id)
    assert sent.event == "ping"
    row.locator("summary").click()
    row.get_by_role("button", name="Replace the secret").click()
    made.filter(has_text="whsec_").wait_for()
    assert made.inner_text() != first
    with reloaded(page):
        page.get_by_role("button", name="Done").click()
    row.locator("summary").click()
    with reloaded(page):
        row.get_by_role("button", name="Delete").click()
    page.get_by_text("No webhook yet.").wait_for()
    assert unexpected(faults, "422") == []


def test_who_may_change_nothing_sees_no_button_and_why(guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "operator"), "/console/admin")
    for path in ("/console/admin", "/console/admin/projects/team"):
        page.goto(url + path)
        page.get_by_text("No permission").first.wait_for()
        assert page.get_by_role("button").count() == 0


def test_a_revoked_session_is_told_so_beside_the_form(guarded: tuple[str, Database], open_page: OpenPage) -> None:
    url, database = guarded
    page = signed_in(open_page(), url, key_in(database, "team", "admin"), "/console/admin")
    (key,) = ApiKeys(database).list()
    page.get_by_text("Create a key", exact=True).click()
    page.locator("#new-key-name").fill("late")
    ApiKeys(database).revoke(key.id)
    page.get_by_role("button", name="Create the key").click()
    page.locator("#new-key-refused", has_text="hint: sign in again").wait_for()
    assert page.locator("#new-key-name").input_value() == "late"


def test_open_forms_refusals_and_a_new_secret_are_accessible_and_fit_a_phone_and_a_screen(
        guarded: tuple[str, Database], open_page: OpenPage, faults: list[str]) -> None:
    url, database = guarded
    scope = within("team", database)
    Projects(database).add_member("team", CreateMember(kind="group", value="researchers", role="operator"), ISSUER)
    hooks = Webhooks(database, scope=scope, allow_private=True, keys=SecretKeys(("a" * 43 + "=",)))
    hooks.create(CreateWebhook(url="http://127.0.0.1:9/a/rather/long/address/of/a/receiver"))
    key_in(database, "team", "operator")
    SHOTS.mkdir(parents=True, exist_ok=True)
    for (width, height), scheme in LOOKS:
        page = signed_in(open_page(viewport={"width": width, "height": height}, color_scheme=scheme), url, TOKEN,
                         "/console/admin")
        for name, path, button in (("admin", "/console/admin", "Create the project"),
                                   ("project", "/console/admin/projects/team", "Add the member")):
            page.goto(url + path)
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            page.get_by_role("button", name=button).click()
            page.locator(".refused:not(:empty)").wait_for()
            if name == "admin":
                page.locator("#new-key-name").fill("nightly")
                page.get_by_role("button", name="Create the key").click()
                page.locator("#key-made code").wait_for()
            page.screenshot(path=SHOTS / f"{name}-changes-{width}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
            assert_accessible(page, f"{name} at {width}, {scheme}")
    assert unexpected(faults, "422") == []
