"""The code dies, or loses the database, at each statement boundary; then all recovers.

For every scene a dry run names the boundaries; then each is struck in a workflow of its own. The
whole form also looks at what is committed at each boundary; the quick one strikes two by seed.
"""

import random

import pytest

from tests.chaos import laws
from tests.chaos.fail_points import FailPoints, How, watched
from tests.chaos.scenes import SCENES, Scene
from tests.chaos.scenes_of_archive import ARCHIVE_SCENES
from tests.chaos.scenes_of_control import CONTROL_SCENES
from tests.chaos.scenes_of_keeping import KEEPING_SCENES
from tests.chaos.world import World

pytestmark = pytest.mark.django_db(transaction=True)

HOWS: tuple[How, ...] = ("dies", "breaks")
ALL = [*SCENES, *CONTROL_SCENES, *ARCHIVE_SCENES, *KEEPING_SCENES]
SEED = 20_261_130
BREAKS = 3
"""The whole form breaks the connection at one boundary in so many; it dies at all of them."""


def boundaries(world: World, scene: Scene, *, looking: bool) -> list[str]:
    """Play a scene unharmed; return the boundaries that it crosses."""
    points = FailPoints()
    if looking:
        points.at_each = world.poll
    play(world, scene, points, tag="dry")
    return points.passed


def play(world: World, scene: Scene, points: FailPoints, *, tag: str) -> None:
    """Play a scene with these fail points, and recover; assert that nothing is lost."""
    ground = scene.arrange(world, tag)
    before = world.model.again()
    world.watch(points)
    with watched(points):
        scene.act(world, ground)
    world.poll()
    lost = laws.in_flight_items(world.look) if scene.dies_in_executor and points.struck else 0
    if points.struck:
        world.restart()
    else:
        world.watch(FailPoints())
    scene.go_on(world, ground)
    world.settle()
    scene.check(world, ground)
    assert world.model.again() - before <= lost + scene.again


def strike(world: World, scene: Scene, how: How, at: int, name: str) -> None:
    points = FailPoints(at=at, how=how)
    try:
        play(world, scene, points, tag=f"{how}{at}")
    except BaseException as error:
        error.add_note(f"{scene.name}: the process {how} at boundary {at}: {name}")
        raise


@pytest.mark.parametrize("scene", ALL, ids=lambda scene: scene.name)
def test_two_boundaries(world: World, scene: Scene) -> None:
    names = boundaries(world, scene, looking=False)
    chance = random.Random(f"{SEED} {scene.name}")

    for how in HOWS:
        at = chance.randrange(len(names))
        strike(world, scene, how, at, names[at])


@pytest.mark.chaos
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("scene", ALL, ids=lambda scene: scene.name)
def test_every_boundary(world: World, scene: Scene, how: How) -> None:
    names = boundaries(world, scene, looking=True)
    chosen = list(range(len(names)))
    if how == "breaks":
        chance = random.Random(f"{SEED} {scene.name}")
        chosen = sorted(chance.sample(chosen, len(names) // BREAKS))

    for at in chosen:
        strike(world, scene, how, at, names[at])
