from django.apps import AppConfig


class FulfillmentConfig(AppConfig):
    name = "fulfillment"
    verbose_name = "Rating fulfillment"
