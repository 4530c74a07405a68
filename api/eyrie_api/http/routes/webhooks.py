"""Routes of webhooks and their deliveries."""

from fastapi import APIRouter, Response

from eyrie_api.http.control import Here
from eyrie_api.v1alpha1.access import CreatedWebhook, CreateWebhook, Delivery, DeliveryList, WebhookList

router = APIRouter(tags=["webhooks"])
WEBHOOKS = "/v1alpha1/webhooks"


@router.post(WEBHOOKS, status_code=201, name="webhook.create")
def create_webhook(request: CreateWebhook, control: Here) -> CreatedWebhook:
    """A new webhook of the project, with the secret its deliveries are signed with, shown this once."""
    webhook, secret = control.webhooks.create(request)
    return CreatedWebhook(webhook=webhook, secret=secret)


@router.get(WEBHOOKS)
def list_webhooks(control: Here) -> WebhookList:
    """Webhooks, without their secrets."""
    return WebhookList(items=control.webhooks.list())


@router.delete(WEBHOOKS + "/{webhook_id}", status_code=204, name="webhook.delete")
def delete_webhook(webhook_id: str, control: Here) -> Response:
    """Delete a webhook with its deliveries."""
    control.webhooks.delete(webhook_id)
    return Response(status_code=204)


@router.post(WEBHOOKS + "/{webhook_id}/rotate", status_code=201, name="webhook.rotate")
def rotate_webhook(webhook_id: str, control: Here) -> CreatedWebhook:
    """Replace the secret: the new one, shown this once, signs every attempt from now on."""
    webhook, secret = control.webhooks.rotate(webhook_id)
    return CreatedWebhook(webhook=webhook, secret=secret)


@router.get(WEBHOOKS + "/{webhook_id}/deliveries")
def list_deliveries(webhook_id: str, control: Here) -> DeliveryList:
    """Its latest hundred deliveries, newest first. Ended ones are kept for two weeks."""
    return DeliveryList(items=control.webhooks.deliveries(webhook_id))


@router.post(WEBHOOKS + "/{webhook_id}/ping", status_code=202, name="webhook.ping")
def ping_webhook(webhook_id: str, control: Here) -> Delivery:
    """Send it a test event, once. One that arrives switches a webhook on again that was switched off."""
    delivery = control.webhooks.ping(webhook_id)
    control.wake()
    return delivery
