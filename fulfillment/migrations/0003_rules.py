"""Moves between states, repeated by the database: policy/lifecycle.py as triggers.

Check constraints say what a row may be; these say what it may become. A workflow's trigger runs
when its state or round changes, a few times in its life. A request's runs its function for what is
refused only: the condition, which is all that a finish pays for, is false for every row that was
PENDING.
"""

from django.db import migrations

WORKFLOW = """
CREATE FUNCTION fulfillment_workflow_moves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        (0, 1), (0, 2),                                  -- RECEIVING: opened, or closed at once
        (1, 2), (1, 3), (1, 4),                          -- OPEN
        (2, 3), (2, 4), (2, 5), (2, 6), (2, 7),          -- RUNNING
        (3, 1), (3, 2), (3, 4), (3, 5), (3, 6), (3, 7),  -- PAUSED
        (4, 5), (4, 6), (4, 7), (4, 8),                  -- ENDING
        (6, 9), (7, 9), (8, 9),                          -- PARTIAL, FAILED, CANCELLED: retry
        (9, 2), (9, 4)                                   -- REOPENING
    ) THEN
        RAISE EXCEPTION 'workflow % may not go from state % to %', OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'workflow_moves';
    END IF;
    IF NEW.round <> OLD.round + (NEW.state = 9 AND OLD.state <> 9)::int THEN
        RAISE EXCEPTION 'workflow % may not go from round % to % in state %',
                        OLD.id, OLD.round, NEW.round, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'workflow_rounds';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER workflow_moves AFTER UPDATE OF state, round ON fulfillment_workflow
    FOR EACH ROW WHEN (OLD.state <> NEW.state OR OLD.round <> NEW.round)
    EXECUTE FUNCTION fulfillment_workflow_moves();
"""

REQUEST = """
CREATE FUNCTION fulfillment_request_moves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'request % is in state % and may not go to %', OLD.id, OLD.state, NEW.state
        USING ERRCODE = 'check_violation', CONSTRAINT = 'request_moves';
END
$$;
CREATE TRIGGER request_moves AFTER UPDATE OF state, score, label ON fulfillment_ratingrequest
    FOR EACH ROW WHEN (
        OLD.state = 1 AND (NEW.state <> 1 OR NEW.score IS DISTINCT FROM OLD.score
                           OR NEW.label IS DISTINCT FROM OLD.label)
        OR OLD.state > 1 AND NEW.state <> 0 AND NEW.state <> OLD.state
    )
    EXECUTE FUNCTION fulfillment_request_moves();
"""


def _forget(table: str, trigger: str) -> str:
    return f"DROP TRIGGER {trigger} ON {table}; DROP FUNCTION fulfillment_{trigger}();"


class Migration(migrations.Migration):
    dependencies = [("fulfillment", "0002_storage")]

    operations = [
        migrations.RunSQL(WORKFLOW, _forget("fulfillment_workflow", "workflow_moves")),
        migrations.RunSQL(REQUEST, _forget("fulfillment_ratingrequest", "request_moves")),
    ]
