from typing import NamedTuple


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    device_name = "cpu"

    def is_cpu(self):
        return self.device_name == "cpu"

    def is_cuda(self):
        return self.device_name == "cuda"

    def get_device_capability(self):
        if not self.is_cuda():
            return None
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability())


current_platform = Platform()
