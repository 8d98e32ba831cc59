"""`torch.distributed.nn.RemoteModule` on aiograd: a module that runs on another worker."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _remote_device

from aiograd.compat.torch_rpc import api
from aiograd.compat.torch_rpc.rref import RRef

__all__ = ["RemoteModule"]

# Methods of nn.Module that would act on parameters, which are not here.
_REFUSED = (
    "register_buffer register_parameter add_module apply cuda ipu xpu cpu type float double half "
    "bfloat16 to register_backward_hook register_forward_pre_hook register_forward_hook state_dict "
    "load_state_dict parameters named_parameters buffers named_buffers children named_children "
    "modules named_modules requires_grad_ zero_grad share_memory extra_repr"
).split()


class RemoteModule(nn.Module):  # type: ignore[misc]
    """A module on another worker: `RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))`.

    `forward` and `forward_async` run there, with gradients. It can be sent to other workers, as a
    reference to the same module.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Any,
        args: Any = None,
        kwargs: Any = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            raise ValueError(
                "a scripted RemoteModule is not supported: TorchScript is deprecated; "
                "leave _module_interface_cls out"
            )
        super().__init__()
        self.on, self.device = _place(remote_device)
        self.is_scriptable, self.is_device_map_set = False, False
        made = (module_cls, args or (), kwargs or {}, self.device)
        self.module_rref = api.remote(self.on, _create, made)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[Any], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a RemoteModule of a module that is there already."""
        if _module_interface_cls is not None:
            raise ValueError("a scripted RemoteModule is not supported: leave it out")
        on, device = _place(remote_device)
        return _rebuild(on, device, module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module there, and wait for its result."""
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module there; return a `torch.futures.Future`."""
        owner = self.module_rref.owner()
        return api.rpc_async(owner, _forward, (self.module_rref, args, kwargs))

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """Return references to the parameters, for a DistributedOptimizer."""
        found: list[RRef[Any]] = api.rpc_sync(self.on, _parameters, (self.module_rref, recurse))
        return found

    def get_module_rref(self) -> RRef[Any]:
        """Return the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode, or out of it."""
        self.module_rref.rpc_sync().train(mode)
        return self

    def eval(self) -> RemoteModule:
        """Put the module into evaluation mode."""
        return self.train(False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The reference refuses to be pickled outside of a call, and says so.
        return _rebuild, (self.on, self.device, self.module_rref)


def _refusing(name: str) -> Any:
    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    return refuse


for _name in _REFUSED:
    setattr(RemoteModule, _name, _refusing(_name))


def _place(remote_device: str) -> tuple[Any, str]:
    """Return worker and device of "name/device", "rank:n/device" or "name"."""
    found = _remote_device(remote_device)
    worker = found.worker_name()
    on = found.rank() if worker is None else worker
    if on is None:
        on = api.get_worker_info().name
    device = str(found.device())
    if device != "cpu":
        raise ValueError(f"a RemoteModule on {device} is not supported: only the CPU is, for now")
    return on, device


def _rebuild(on: Any, device: str, module_rref: RRef[Any]) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    module.on, module.device, module.module_rref = on, device, module_rref
    module.is_scriptable, module.is_device_map_set = False, False
    return module


# ── at the owner ────────────────────────────────────────────────────────────────────────────────


def _create(cls: Any, args: Any, kwargs: Any, device: str) -> Any:
    module = cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _forward(module_rref: RRef[Any], args: Any, kwargs: Any) -> Any:
    return module_rref.local_value()(*args, **kwargs)


def _parameters(module_rref: RRef[Any], recurse: bool) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]
