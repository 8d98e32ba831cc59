"""Learning rates over time: a schedule is a formula of the epoch, applied after each `step()`.

The rate is computed from the epoch and the initial rate, not from the last rate: rounding does not
add up, and a schedule can start anywhere. The optimiser may be local or a `DistributedOptimizer`,
whose next step takes the rate to its owners.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from aiograd.optim.optimizer import Group


class Optimizer(Protocol):
    """Anything with settings in groups: an optimiser here, or one over many workers."""

    @property
    def param_groups(self) -> list[Group]:
        """The settings of each group, to be changed in place."""


class Scheduler:
    """Sets `lr` of every group to `rate(initial, epoch)`; call `step()` once per epoch.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> class Halve(ag.optim.Scheduler):
    ...     def rate(self, initial, epoch):
    ...         return initial * 0.5**epoch
    >>> schedule = Halve(opt)
    >>> schedule.step()
    >>> opt.param_groups[0]["lr"]
    0.5
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.last_epoch: int = 0
        for group in optimizer.param_groups:
            # In the group, as in torch: it is saved with the optimiser, and a second schedule
            # starts from it too.
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [
            float(group["initial_lr"]) for group in optimizer.param_groups
        ]
        self._set()

    def rate(self, initial: float, epoch: int) -> float:
        """Return the learning rate at an epoch, for a group that started with `initial`."""
        raise NotImplementedError(f"{type(self).__name__} needs a rate()")

    def rates(self) -> list[float]:
        """Return the learning rate of every group now."""
        return [self.rate(initial, self.last_epoch) for initial in self.base_lrs]

    def step(self) -> None:
        """Go on to the next epoch."""
        self.last_epoch += 1
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(), strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """Return the learning rates in use, one per group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue, without the optimiser and without functions."""
        return {
            key: value
            for key, value in vars(self).items()
            # Private attributes hold functions (`LambdaLR`), which do not belong in a file.
            if key != "optimizer" and not key.startswith("_")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        # The rate is set at once: the optimiser's own state may be older or newer.
        vars(self).update(state_dict)
        self._set()


class StepLR(Scheduler):
    """Multiply by `gamma` every `step_size` epochs.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.StepLR(opt, step_size=2, gamma=0.1)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 1.0, 0.1, 0.1]
    """

    step_size: int
    gamma: float

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        # Before the constructor of the base, which sets the first rate.
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer)

    def rate(self, initial: float, epoch: int) -> float:
        """gamma ** (epochs // step_size) times the initial rate."""
        return float(initial * self.gamma ** (epoch // self.step_size))


class MultiStepLR(Scheduler):
    """Multiply by `gamma` at each of the milestones.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.MultiStepLR(opt, milestones=[1, 3], gamma=0.1)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 0.1, 0.1, 0.01]
    """

    milestones: list[int]
    gamma: float

    def __init__(self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1) -> None:
        # Sorted for the bisection; users may give them in any order.
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer)

    def rate(self, initial: float, epoch: int) -> float:
        """The initial rate times gamma for each milestone passed."""
        return float(initial * self.gamma ** bisect_right(self.milestones, epoch))


class ExponentialLR(Scheduler):
    """Multiply by `gamma` every epoch.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.ExponentialLR(opt, gamma=0.5)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 0.5, 0.25, 0.125]
    """

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def rate(self, initial: float, epoch: int) -> float:
        """gamma ** epoch times the initial rate."""
        return float(initial * self.gamma**epoch)


class CosineAnnealingLR(Scheduler):
    """Follow half a cosine from the initial rate down to `eta_min` in `T_max` epochs.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.CosineAnnealingLR(opt, T_max=2)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 0.5, 0.0, ...]
    """

    t_max: int
    eta_min: float

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:  # noqa: N803
        self.t_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer)

    def rate(self, initial: float, epoch: int) -> float:
        """Between the initial rate and `eta_min`; goes up again behind `T_max`."""
        wave = (1 + math.cos(math.pi * epoch / self.t_max)) / 2
        return self.eta_min + (initial - self.eta_min) * wave


class LinearLR(Scheduler):
    """Go in a straight line from one factor of the initial rate to another.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.LinearLR(opt, start_factor=0.5, total_iters=2)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [0.5, 0.75, 1.0, 1.0]
    """

    start_factor: float
    end_factor: float

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
    ) -> None:
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = total_iters
        super().__init__(optimizer)

    def rate(self, initial: float, epoch: int) -> float:
        """Between the two factors, and at the second one afterwards."""
        # Stays at the second factor once it is reached.
        done = min(epoch, self.total_iters) / self.total_iters
        return initial * (self.start_factor + (self.end_factor - self.start_factor) * done)


class LambdaLR(Scheduler):
    """Multiply the initial rate by a function of the epoch (one for all groups, or one each).

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.LambdaLR(opt, lambda epoch: 1 / (1 + epoch))
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 0.5, 0.333, 0.25]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
    ) -> None:
        count = len(optimizer.param_groups)
        # Private, and so not part of the state: functions cannot be saved.
        self._functions = [lr_lambda] * count if callable(lr_lambda) else list(lr_lambda)
        if len(self._functions) != count:
            raise ValueError(f"{len(self._functions)} functions for {count} parameter groups")
        super().__init__(optimizer)

    def rates(self) -> list[float]:
        """Each group by its own function."""
        pairs = zip(self.base_lrs, self._functions, strict=True)
        return [initial * function(self.last_epoch) for initial, function in pairs]


# No Scheduler: it depends on measurements, not on the epoch.
class ReduceLROnPlateau:
    """Lower the rate when a measured value has not improved for `patience` epochs.

    >>> opt = ag.optim.SGD([ag.nn.Parameter(1.0)], lr=1.0)
    >>> schedule = ag.optim.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    >>> rates = []
    >>> for epoch in range(4):
    ...     rates.append(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     schedule.step(1.0)
    >>> [round(rate, 3) for rate in rates]
    [1.0, 1.0, 0.5, 0.25]
    """

    factor: float
    patience: int
    threshold: float
    cooldown: int
    min_lr: float
    eps: float
    best: float
    resting: int
    bad_epochs: int

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if factor >= 1:
            raise ValueError(f"the factor must be below 1, not {factor}")
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ValueError("mode is 'min' or 'max', threshold_mode is 'rel' or 'abs'")
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.min_lr, self.eps = cooldown, min_lr, eps
        self.best = math.inf if mode == "min" else -math.inf
        self.bad_epochs: int = 0
        self.resting: int = 0
        self.last_epoch: int = 0

    def step(self, metric: Any) -> None:
        """Take the value of this epoch, and lower the rate if it has not improved for long."""
        value = float(metric)
        self.last_epoch += 1
        if self._better(value):
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        # After a reduction nothing counts for `cooldown` epochs: the value needs time to follow.
        if self.resting > 0:
            self.resting -= 1
            self.bad_epochs = 0
        if self.bad_epochs > self.patience:
            self._lower()
            self.resting, self.bad_epochs = self.cooldown, 0

    def _better(self, value: float) -> bool:
        # The first value is better than none; a margin relative to infinity would be nan.
        if math.isinf(self.best):
            return True
        margin = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        if self.mode == "min":
            return value < self.best - margin
        return value > self.best + margin

    def _lower(self) -> None:
        for group in self.optimizer.param_groups:
            old = float(group["lr"])
            new = max(old * self.factor, self.min_lr)
            # torch's guard: below this a lower rate changes nothing.
            if old - new > self.eps:
                group["lr"] = new

    def get_last_lr(self) -> list[float]:
        """Return the learning rates in use, one per group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue, without the optimiser."""
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        vars(self).update(state_dict)
