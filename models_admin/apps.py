from django.apps import AppConfig


class ModelsAdminConfig(AppConfig):
    name = "models_admin"
    verbose_name = "Model management"
