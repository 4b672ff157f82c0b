"""The lines that `mutants.py` breaks, file by file, and the tests that should notice."""

# a line as it is, and the line in its place; or these, and why that must survive
TABLES: dict[str, tuple[str, list[tuple[str, ...]]]] = {}

TABLES["algorithm/values.py"] = (
    "values updates",
    [
        ("return 0.5 * (self.high - self.low) * raw", "return (self.high - self.low) * raw"),
        ("* raw + 0.5 * (self.high + self.low)", "* raw + 0.5 * (self.high - self.low)"),
        ("return jnp.clip(value, self.low, self.high)", "return value"),
        ("else rollout.reward) - temperature *", "else rollout.reward) + temperature *"),
        ("rollout.going_reward if endings", "rollout.reward if endings"),
        ('"endings": rollout.alive[1:],', '"endings": rollout.alive[:-1],'),
        ("low, high = jnp.where(earned, low, bounds.low)", "low, high = jnp.where(True, low, bounds.low)"),
        ("moved.reaching(end_rewards if endings else None)", "moved"),
        ("jnp.minimum(end_rewards.low, 0.0)", "end_rewards.low"),
        ("jnp.maximum(end_rewards.high, 0.0)", "end_rewards.high"),
        ("low = jnp.where(seen,", "low = jnp.where(True,"),
        (".get(config.bounds, rollout.alive[:horizon])", ".get(config.bounds, rollout.alive[1:])"),
        ("counted.ravel() > 0.5, q) / (1.0 - discount)", "counted.ravel() > 0.5, q)"),
        ("for q in (config.quantile, 1.0 - config.quantile)", "for q in (1.0 - config.quantile, config.quantile)"),
        ("low, high = jnp.minimum(low, 0.0)", "low, high = jnp.maximum(low, 0.0)"),
        ('== "alive_and_zero" and can_end:', '== "alive_and_zero":'),
        ("rate = jnp.where(bounds.known, config.bounds_rate, 1.0)", "rate = config.bounds_rate"),
        ("bounds.high + rate * (high - bounds.high)", "bounds.high + rate * (low - bounds.high)"),
        ("return jax.lax.stop_gradient(moved.", "return (moved."),
        ("jnp.sort(jnp.where(counted, x, jnp.inf))", "jnp.sort(x)"),
        ("(jnp.maximum(jnp.sum(counted), 1) - 1)", "jnp.maximum(jnp.sum(counted), 1)"),
        ("above = jnp.ceil(place)", "above = jnp.floor(place)"),
        ("bonus = -temperature * rollout.log_prob", "bonus = temperature * rollout.log_prob"),
        ("discount ** jnp.arange(horizon + 1)", "discount ** (1 + jnp.arange(horizon + 1))"),
        ("discounts[:, None] * rollout.alive * gained", "discounts[:, None] * gained"),
        ("gained = jnp.where(rollout.alive > 0.0, gained, 0.0)", "gained = gained"),
        ("discount) + temperature * rollout.log_prob[0]", "discount) - temperature * rollout.log_prob[0]"),
        ("discount) + temperature * rollout.log_prob[0]", "discount)"),
    ],
)
TABLES["algorithm/actor_critic.py"] = (
    "values updates",
    [
        ("factor * last.bias + shift", "factor * last.bias"),
        ("moved = (factor * last.weight,", "moved = (last.weight,"),
        ("return jnp.exp(self.log_temperature)", "return self.log_temperature"),
        ("jnp.concatenate([obs, act], axis=-1)", "jnp.concatenate([act, obs], axis=-1)"),
        ("lambda critic, seeds: critic(inputs, seeds)", "lambda critic, seeds: critic(inputs)"),
    ],
)
# the actor against the critics as they were before the update
_NEW = "actor_objective(context, actor_critic"
_OLD = "actor_objective(context, eqx.tree_at(lambda a: a.critics, actor_critic, old)"
_JOINT = """    actor_critic, opt_states, metrics = critic_update(context, actor_critic, opt_states, inputs, path)

    objective, gradient = jax.value_and_grad(lambda rollout: actor_objective(context, actor_critic, rollout))(rollout)
"""
_LAST_OBS = "    obs = context.world.obs_normalizer.normalize(rollout.obs[-1])"
_BONUS = "    bonus_weight = actor_critic.temperature * context.reward_unit"
TABLES["algorithm/updates.py"] = (
    "updates relatives values",
    [
        (_JOINT, _JOINT.replace("    actor", "    old = actor_critic.critics\n    actor", 1).replace(_NEW, _OLD)),
        ("lambda x: -x / context.reward_unit", "lambda x: x / context.reward_unit"),
        ("lambda x: -x / context.reward_unit", "lambda x: -x"),
        ("surplus = entropy - config", "surplus = entropy + config"),
        ("target_entropy_per_action * task.act_size", "target_entropy_per_action"),
        ("entropy = actor_critic.temperature, -jnp.mean(", "entropy = actor_critic.temperature, jnp.mean("),
        ("temperature * surplus, opt_states", "surplus, opt_states"),
        ("temperature * surplus, opt_states", "-temperature * surplus, opt_states"),
        ("jnp.square((q - target[None]) / unit)", "jnp.square((q + target[None]) / unit)"),
        ("jnp.square((q - target[None]) / unit)", "jnp.square(q - target[None])"),
        ("actor_critic.temperature * unit,", "actor_critic.temperature,"),
        ("value * jnp.square(unit) / config", "value / config"),
        (f"{_BONUS}\n    return jnp.mean", "    bonus_weight = actor_critic.temperature\n    return jnp.mean"),
        ("jnp.min(bounds.scale(last_q), axis=0)", "jnp.max(bounds.scale(last_q), axis=0)"),
        ("jnp.min(bounds.scale(last_q), axis=0)", "jnp.mean(bounds.scale(last_q), axis=0)"),
        ("bounds.clip(jnp.min(bounds.scale(last_q), axis=0))", "jnp.min(bounds.scale(last_q), axis=0)"),
        ("x[chosen], actor_critic.target_critics)", "x[chosen], actor_critic.critics)"),
        ("x[chosen], actor_critic.target_critics)", "x, actor_critic.target_critics)"),
        (f"{_LAST_OBS}\n    asked = ", f"{_LAST_OBS.replace('-1', '0')}\n    asked = "),
        (f"{_LAST_OBS}\n    asked = ", "    obs = rollout.obs[-1]\n    asked = "),
        ("critic_values(asked, obs, rollout.act[-1])", "critic_values(asked, obs, rollout.act[0])"),
        (f"{_BONUS}\n    return expand_q", f"{_BONUS} * 2.0\n    return expand_q"),
        ("return expand_q(rollout, least", "return expand_value(rollout, least"),
        ("least, bonus_weight, context.discount", "least, bonus_weight, 0.999 * context.discount"),
        ("jnp.sum(jnp.mean(jnp.square((q", "jnp.mean(jnp.mean(jnp.square((q"),
        ("rate * new + (1.0 - rate) * old", "rate * old + (1.0 - rate) * new"),
        ("jax.tree.map(follow, critics, actor", "jax.tree.map(follow, actor_critic.critics, actor"),
        ("actor_critic = eqx.tree_at(lambda a: a.bounds, actor_critic, bounds)", "pass"),
        ("last_q = jnp.mean(actor_critic.bounds", "last_q = jnp.min(actor_critic.bounds"),
        ("raw = critic_values(actor_critic.critics, obs", "raw = critic_values(actor_critic.target_critics, obs"),
        (f"{_LAST_OBS}\n    raw = ", f"{_LAST_OBS.replace('-1', '0')}\n    raw = "),
        (
            "obs = world.obs_normalizer.normalize(rollout.obs[0])",
            "obs = world.obs_normalizer.normalize(rollout.obs[-1])",
        ),
        ("obs = world.obs_normalizer.normalize(rollout.obs[0])", "obs = rollout.obs[0]"),
        ("critic_values(critics, obs, rollout.act[0]", "critic_values(critics, obs, rollout.act[-1]"),
        ("rollout.act[0], inputs.dropout_seeds)", "rollout.act[0])"),
        ("rows(context.world.obs_normalizer.normalize(visited))", "rows(visited)"),
        ("(members,)))[: schedule.target_members(context.config, context.task.can_end)]", "(members,)))"),
        ("if steps is None:", "if True:"),
        ("jnp.mean(path.alive[-1])", "jnp.mean(path.alive[0])"),
        ("return eqx.apply_updates(parameters, updates)", "return eqx.apply_updates(parameters, gradient)"),
        (
            "rollout = jax.lax.stop_gradient(rollout)",
            "pass",
            "the critics' gradient is taken with respect to the critics alone; it only spares the compiler work",
        ),
    ],
)
TABLES["algorithm/rollouts.py"] = (
    "rollouts termination_model relatives",
    [
        ("jnp.where(goes_on[:, None] > 0, next_obs, restart)", "next_obs"),
        ("return jax.lax.stop_gradient((steps, last))", "return steps, last"),
        ("next_obs, 1.0 - goes_on)", "next_obs, goes_on)"),
        ("(starts[1:], noise.act[:-1]", "(starts[:-1], noise.act[:-1]"),
        ("next_obs, reward, uniform)", "next_obs, reward, None)"),
        ("left = alive * goes_on\n", "left = goes_on\n"),
        ("return (next_obs, left)", "return (jax.lax.stop_gradient(next_obs), left)"),
        ("return (next_obs, left)", "return (next_obs, jax.lax.stop_gradient(left))"),
        ("jnp.where(left[:, None] > 0.0, next_obs, obs)", "next_obs"),
        ("normalize(obs)) + perturbation, act_noise", "normalize(obs)), act_noise"),
        ("perturbations[-1], noise.act[-1])", "perturbations[0], noise.act[-1])"),
        ("perturbations[-1], noise.act[-1])", "perturbations[-1], noise.act[0])"),
        ("(perturbations[:-1], noise.act[:-1]", "(perturbations[1:], noise.act[:-1]"),
        ("jnp.concatenate([steps.obs, last[None]])", "jnp.concatenate([steps.next_obs, last[None]])"),
        ("alive = 1.0 - step.terminated", "alive = jnp.ones_like(step.terminated)"),
        ("normalize(step.next_obs)), noise)", "normalize(step.obs)), noise)"),
        ("jnp.stack([log_prob, next_log_prob])", "jnp.stack([next_log_prob, log_prob])"),
        ("jnp.stack([step.act, next_act])", "jnp.stack([next_act, next_act])"),
        ("step.reward if task.reward is None else", "step.reward if True else"),
        ("jr.normal(key_act, (horizon + 1,", "jr.normal(key_state, (horizon + 1,"),
        ("ends=jr.uniform(key_ends,", "ends=jr.normal(key_ends,"),
    ],
)
TABLES["algorithm/world_model.py"] = (
    "world_model termination_model model_fit",
    [
        ("jnp.exp(log_noise[:, 1:])", "jnp.exp(world.members.log_noise[:1, 1:])"),
        (".at[:, 1:].add(", ".at[:, :-1].add("),
        ("noise.assignment.to_rows(sampled)", "sampled.reshape(-1, sampled.shape[-1])"),
        ("target_normalizer.denormalize(", "target_normalizer.normalize("),
        ("next_obs = obs + target[:, 1:]", "next_obs = target[:, 1:]"),
        ("return next_obs, target[:, 0]", "return next_obs, target[:, -1]"),
        ("[world.obs_normalizer.normalize(obs), act]", "[obs, act]"),
        ("task.reward(obs, act, next_obs)", "task.reward(next_obs, act, obs)"),
        ("config.terminator.rewards and self.end_rewards is not None", "self.end_rewards is not None"),
        ("config.terminator.rewards and self.end_rewards is not None", "config.terminator.rewards"),
        ("continues = 1.0 - jax.lax.stop_gradient(task", "continues = jax.lax.stop_gradient(task"),
        ("uniform >= probability", "uniform < probability"),
        ("continues = 1.0 - probability", "continues = 1.0 - jax.lax.stop_gradient(probability)"),
        ("continues = 1.0 - probability", "continues = 1.0 + probability"),
        ("continues * going + (1.0 - continues)", "continues * reward + continues"),
        (" or task.reward is not None:", ":"),
        ("[reward[:, None], next_obs - obs]", "[next_obs - obs, reward[:, None]]"),
        ("[reward[:, None], next_obs - obs]", "[reward[:, None], obs - next_obs]"),
    ],
)
TABLES["algorithm/ensemble.py"] = (
    "world_model",
    [
        ("_permute(x.reshape(-1, x.shape[-1]), self.inverse, self.order)", "x.reshape(-1, x.shape[-1])"),
        ("_permute(cotangent, orders[1], orders[0])", "_permute(cotangent, orders[0], orders[1])"),
        ("order = jnp.argsort(jr.bits(key, shape), axis=-1)", "order = jnp.argsort(jnp.zeros(shape), axis=-1)"),
        ("return -(-num_rows // max(1, num_members))", "return (num_rows // max(1, num_members))"),
    ],
)
TABLES["algorithm/model_fit.py"] = (
    "model_fit",
    [
        ("1.0 - rows.terminated if world.learns_end_rewards(config) else None", "None"),
        ("jnp.exp(-2.0 * log_noise)", "jnp.exp(-log_noise)"),
        ("return 0.5 * error + jnp.maximum", "return error + jnp.maximum"),
        ("jnp.maximum(log_noise, jnp.log(min_noise))", "log_noise"),
        ("jnp.var(mean, axis=0, ddof=1)", "jnp.var(mean, axis=0)"),
        ("jnp.exp(2.0 * jnp.mean(log_noise, axis=0))", "jnp.mean(jnp.exp(2.0 * log_noise), axis=0)"),
        ("return 0.5 * (error / variance", "return (error / variance"),
        ("terms.at[:, 0].multiply(has_reward)", "terms.at[:, 1].multiply(has_reward)"),
        ("1.0 - rows.terminated if world", "rows.terminated if world"),
        ("jnp.mean(total if weight is None else weight * total)", "jnp.mean(total)"),
        ("target.at[:, 0].add(noise)", "target.at[:, 1].add(noise)"),
        ("member(inputs, seeds)", "member(inputs)"),
        ("lambda u, d, m: u + d * m", "lambda u, d, m: u - d * m"),
        ("enumerate(config.model.weight_decay)", "enumerate(config.model.weight_decay[::-1])"),
        ("optax.scale(-config.fit.learning_rate)", "optax.scale(config.fit.learning_rate)"),
        ("fori_loop(0, budget.max_epochs, epoch, carry)", "fori_loop(0, 1, epoch, carry)"),
        ("fori_loop(0, budget.fit_batches, minibatch, carry)", "fori_loop(0, 1, minibatch, carry)"),
        ("noise, carry, jr.fold_in(key, i))", "noise, carry, jr.fold_in(key, 0))"),
        ("round(config.fit.recent_share * uniform.shape[-1])", "round(config.fit.recent_share)"),
        ("budget.num_rows / _RECENT, budget.num_rows)", "budget.num_rows, budget.num_rows / _RECENT)"),
        ("return replays.rows_of_age(replay, age, budget.num_rows)", "return age"),
        ("return replays.rows_of_age(replay, age, budget.num_rows)", "return budget.num_rows - 1 - age"),
        ("replays.rows_of_age(replay, ages, budget.num_rows)", "ages"),
        ("(ages < budget.num_new) & (budget.num_new", "(ages >= 0) & (budget.num_new"),
        ("(ages < budget.num_new) & (budget.num_new < budget.num_rows)", "(ages < budget.num_new)"),
        ("rmse(jnp.mean(mean, axis=0) - newest.target)", "rmse(mean[0] - newest.target)"),
    ],
)
TABLES["algorithm/early_stopping.py"] = (
    "early_stopping",
    [
        ("jnp.where(used, new - best, 0.0)", "jnp.where(used, best - new, 0.0)"),
        ("jnp.where(used, new - best, 0.0)", "new - best"),
        ("norm.cdf(mean * jnp.sqrt(num_rows)", "norm.cdf(mean"),
        ("jnp.maximum(num_rows - 1, 1)", "num_rows"),
        ("accepted = p < config.fit.accept_p", "accepted = p > config.fit.accept_p"),
        ("jnp.where(p < config.fit.keep_p, 0, state.stale + 1)", "state.stale + 1"),
        ("jnp.where(p < config.fit.keep_p, 0, state.stale + 1)", "jnp.where(p < config.fit.keep_p, 0, state.stale)"),
        ("(epoch < budget.max_epochs)", "(epoch <= budget.max_epochs)"),
        ("(stale <= budget.patience)", "(stale < budget.patience)"),
        ("_where(accepted, members, state.best_members)", "members"),
        ("_where(accepted, members, state.best_members)", "state.best_members"),
        ("jnp.where(accepted, score, state.best_score)", "score"),
        ("replays.training_rows(replay, jnp.arange(room))", "jnp.arange(room)"),
        ("replays.take(replay, replays.validation_rows(replay, which))", "replays.take(replay, which)"),
        ("jr.randint(key, shape, 0, num_training)", "jr.randint(key, shape, 0, budget.num_rows)"),
        ("jnp.sum(jnp.where(valid, squared, 0.0)) / num_valid", "jnp.sum(squared) / num_valid"),
        ("jnp.where(valid, row_totals(", "jnp.where(True, row_totals("),
        ("jnp.minimum(drawn, high - 1)", "low"),
        ("jnp.where(fitting, chosen, num_seeds)", "chosen"),
    ],
)
TABLES["algorithm/replay_buffer.py"] = (
    "replay_buffer",
    [
        ("at = (replay.position + jnp.arange(num_rows)) % capacity", "at = jnp.arange(num_rows) % capacity"),
        ("position=(replay.position + num_rows) % capacity", "position=replay.position + num_rows"),
        ("replay.position // group_size + jnp.arange(num_groups)", "jnp.arange(num_groups)"),
        ("(num_groups,), 0, group_size)", "(num_groups,), 0, group_size - 1)"),
        ("jr.exponential(key_weight, ", "1.0 + 0 * jr.exponential(key_weight, "),
        ("rank + (rank >= replay.held_out[group])", "rank + (rank > replay.held_out[group])"),
        ("rank + (rank >= replay.held_out[group])", "rank"),
        ("which * group_size + replay.held_out[which]", "which * group_size"),
        ("num_rows // group_size * (group_size - 1)", "num_rows // group_size * group_size"),
        ("position=num_rows,", "position=replay.position,"),
        ("num_stored % replay.rows.reward.shape[-1]", "num_stored"),
        ("replay.rows), replay.weight[at]", "replay.rows), replay.weight[: at.shape[0]]"),
    ],
)
TABLES["algorithm/end_rewards.py"] = (
    "termination_model",
    [
        (
            "jnp.clip(self.normalizer.denormalize(x[:, None])[:, 0], self.low, self.high)",
            "self.normalizer.denormalize(x[:, None])[:, 0]",
        ),
        ("seen = jnp.any(ended)", "seen = jnp.array(True)"),
        ("jnp.where(ended, reward, jnp.inf)", "reward"),
    ],
)
TABLES["algorithm/normalizer.py"] = (
    "world_model",
    [
        ("return (x - _along(self.mean, x)) / _along", "return (x + _along(self.mean, x)) / _along"),
        ("x * _along(self.std, x) + _along(self.mean, x)", "(x + _along(self.mean, x)) * _along(self.std, x)"),
        ("jnp.square(x - mean[None]), used) / count", "jnp.square(x - mean[None]), used) / (count - 1)"),
        ("jnp.square(x - mean[None])", "jnp.square(x)"),
        ("jnp.where(std > 0.0, std, 1.0)", "std"),
        ("jnp.maximum(jnp.sqrt(variance), _SMALLEST_CHANGE * obs_normalizer.std)", "jnp.sqrt(variance)"),
        ("_spread(reward[:, None], used & ~ended)", "_spread(reward[:, None], used)"),
        ("jnp.where(all_rewards > 0.0, all_rewards, 1.0)", "1.0"),
        ("jnp.where(std > _ROUNDING * jnp.abs(mean), std, 0.0)", "std"),
        ("jnp.where(used[:, None], x, 0.0)", "x"),
    ],
)
TABLES["algorithm/termination_model.py"] = (
    "termination_model",
    [
        ("jax.nn.sigmoid(outputs[..., 0] + self.log_odds)", "jax.nn.sigmoid(outputs[..., 0])"),
        ("labels * jnp.square(outputs[..., 1] - reward)", "jnp.square(outputs[..., 1] - reward)"),
        ("jnp.log(share) - jnp.log1p(share)", "jnp.log1p(share) - jnp.log(share)"),
        ("jnp.log(share) - jnp.log1p(share)", "jnp.log(share)"),
        ("jnp.asarray(-jnp.inf, jnp.float32)", "jnp.zeros(())"),
        ("jnp.where(num_ends > 0, budget.termination_batches, 0)", "0"),
        ("jnp.abs(weight) - by, 0.0)", "jnp.abs(weight) + by, 0.0)"),
        ("config.learning_rate * config.sparsity", "0.0"),
        ("[normalizer.normalize(obs), act, normalizer.normalize(next_obs)]", "[normalizer.normalize(obs), act, obs]"),
        ("jnp.concatenate([ends, jr.randint(key_any, shape, 0, num_training)]", "jnp.concatenate([ends, ends]"),
        ("counted & (probability > 0.5)", "counted & (probability < 0.5)"),
        ('"termination/recall": both / jnp.sum(ended)', '"termination/recall": both / jnp.sum(predicted)'),
        ('"termination/precision": both / jnp.sum(predicted)', '"termination/precision": both / jnp.sum(ended)'),
        ("replays.validation_rows(replay, which)", "which"),
        ("return rows, newest_first < budget.num_rows // group_size", "return rows, newest_first < 1"),
        ("used = replays.training_rows(replay, which) if holds_out else which", "used = which"),
        ("if holds_out else capacity)", "if holds_out else capacity // 5 * 4)"),
        ("else jnp.asarray(budget.num_rows)", "else jnp.asarray(budget.num_new)"),
        ("_precision_and_recall(model, normalizer, *_newest(", "_precision_and_recall(fitted, normalizer, *_newest("),
        ("replays.rows_of_age(replay, age, budget.num_rows)", "age"),
        ("(age < budget.num_new) & (budget.num_new < budget.num_rows)", "age < budget.num_new"),
        ("(age < budget.num_new) & (budget.num_new < budget.num_rows)", "budget.num_new < budget.num_rows"),
        ("(replay.position // group_size - 1 - newest_first) % num_groups", "newest_first"),
    ],
)
TABLES["algorithm/model_buffer.py"] = (
    "start_states",
    [
        ("at = (buffer.position + jnp.arange(count)) % capacity", "at = jnp.arange(count) % capacity"),
        ("size=jnp.minimum(buffer.size + count, capacity)", "size=jnp.minimum(buffer.size, capacity) + count"),
        (
            "jr.randint(key, (batch_size,), 0, buffer.size)",
            "jr.randint(key, (batch_size,), 0, buffer.rows.obs.shape[0])",
        ),
        (
            "jnp.zeros_like(buffer.position), jnp.zeros_like(buffer.size)",
            "buffer.position, jnp.zeros_like(buffer.size)",
        ),
    ],
)
TABLES["algorithm/start_states.py"] = (
    "start_states",
    [
        ("num_real = round(config.policy.replay_start_share * batch_size)", "num_real = 0"),
        (
            "model_buffer.sample(self.imagined, batch_size - num_real, key_imagined)",
            "model_buffer.sample(self.real, batch_size - num_real, key_imagined)",
        ),
        (
            "States(visited(steps, last)) if config.horizons.training > 0",
            "States(steps.next_obs) if config.horizons.training > 0",
        ),
        ("States(replay.rows.obs) if config", "States(replay.rows.next_obs) if config"),
        ("return start if isinstance(start, Transition) else None", "return None"),
    ],
)
TABLES["algorithm/agent.py"] = (
    "iteration agent terminal_rewards",
    [
        ("ended & world.learns_end_rewards(config)", "ended & False"),
        ("task.learns_termination or learns_rewards", "task.learns_termination"),
        ("key, key_store = _split(state.key)", "key, key_store = state.key, state.key"),
        ("(s.world, s.key), state, (world, key)", "(s.world, s.key), state, (world, state.key)"),
        ("round(steps * config.policy.critic_only_share)", "0"),
        ("jr.split(jr.fold_in(key_rounds, i))", "jr.split(key_rounds)"),
        ("repeat(joint_update, config", "repeat(critic_only_update, config"),
        ("(horizon + 1, batch), 0, num_rows)", "(horizon + 1, batch), 0, num_rows - 1)"),
        ("(horizon + 1, batch), 0, num_rows)", "(horizon + 1, batch), 0, 2 * num_rows)"),
        ("buffer is not None and config.policy.clear_each_iteration:", "buffer is not None and False:"),
        ("opt_states if config.policy.keep_moments else None", "None"),
        ("effort = first_effort or 1.0", "effort = 1.0"),
        ("num_new=steps if first_effort is None else num_rows", "num_new=steps"),
        ("num_rounds=max(1, rounds)", "num_rounds=rounds + 1"),
        ("fit_observations(rows.obs, used)", "fit_observations(rows.next_obs, used)"),
        ("rows.reward.shape[0]) < num_rows\n", "rows.reward.shape[0]) <= num_rows\n"),
        ("budget.num_rounds, lambda", "budget.num_rounds + 1, lambda"),
        (
            "return jax.lax.scan(body, learner, inputs)",
            "return jax.lax.scan(body, learner, jax.tree.map(lambda x: x[:1], inputs))",
        ),
        (
            "state.opt_states or fresh_opt_states(config, actor_critic)",
            "fresh_opt_states(config, actor_critic)",
        ),
        ("_split(state.key, 4)[3]", "state.key"),
    ],
)
TABLES["acting/policy.py"] = (
    "policy real_returns",
    [
        ("return np.tanh(mean if noise is None", "return (mean if noise is None"),
        ("mean + std * noise)", "mean + noise)"),
        ("(obs - self.obs_mean) / self.obs_std", "(obs - self.obs_mean) * self.obs_std"),
        ("x = x * (0.5 * (1.0 + np.tanh(0.5 * x)))", "x = x * (0.5 * (1.0 + np.tanh(x)))"),
        ("np.logaddexp(0.0, raw_std) + MIN_ACTION_STD", "np.exp(raw_std) + MIN_ACTION_STD"),
        ("np.sum(log_prob - log_derivative, axis=-1)", "np.sum(log_prob + log_derivative, axis=-1)"),
        ("- np.log(std) - 0.5", "- 0.5"),
        ("to_own_units(self.act(flat, noise), self.action_low, self.action_high)", "self.act(flat, noise)"),
        ("if not deterministic:", "if deterministic:"),
    ],
)
TABLES["schedule.py"] = (
    "task_rules",
    [
        ("if config.policy.discount is not None:", "if False:"),
        ("0.4 * episode_steps", "0.2 * episode_steps"),
        ("min(max(counted, _FEWEST_COUNTED), _MOST_COUNTED)", "max(counted, _FEWEST_COUNTED)"),
        ("min(max(counted, _FEWEST_COUNTED), _MOST_COUNTED)", "min(counted, _MOST_COUNTED)"),
        ("return float(can_end) if noise is None else noise", "return float(not can_end) if noise is None else noise"),
        ("return float(can_end) if noise is None else noise", "return float(can_end)"),
        ("min(2 if can_end else 1, config", "min(1 if can_end else 2, config"),
        ("config.critic.target_members or min", "min"),
        ("min(2 if can_end else 1, config.critic.members)", "(2 if can_end else 1)"),
    ],
)
TABLES["training/train.py"] = (
    "task_rules",
    [
        ("not 0 < truncated < progress.spec.time_limit:", "not 0 < truncated:"),
        ("progress.update(cut_after=after)\n", "pass\n"),
        ("max(known or 0, truncated, longest)", "max(known or 0, truncated)"),
        ("max(known or 0, truncated, longest)", "(known or truncated)"),
        ("    if now != before:", "    if now == before:"),
    ],
)
TABLES["acting/env_runner.py"] = (
    "task_rules machines workers",
    [
        ("or (to_end and self.obs is not None)", "or False"),
        ("to_end = to_end and not self.simulator.can_pause", "to_end = to_end"),
        ("if now is not None or was_paused:", "if now is not None:"),
        ("if now is not None or was_paused:", "if was_paused:"),
        ("        self.simulator.pause()\n", "        pass\n"),
        ("        self._end_wait()\n", "        pass\n"),
        ("if self.obs is not None and self.simulator.moved():", "if False:"),
        ("(self.replays and self._replay(episode, step))", "self._replay(episode, step)"),
        ("not np.array_equal(self.obs, episode.first_obs)", "False"),
        ("if len(alarms) >= _ALARMS else", "if alarms else"),
        ("len(self.actions) if cut and not ended else 0", "len(self.actions) if cut else 0"),
        ("len(self.actions) if cut and not ended else 0", "len(self.actions) if ended else 0"),
    ],
)
TABLES["acting/workers.py"] = (
    "workers machines",
    [
        ("if then_waits and self._runners is not None:", "if False:"),
        ("parts += [] if self.ahead is None else [self.ahead]", "pass"),
        ("for step, batch in self._handed if step >= since]", "for step, batch in self._handed]"),
        ("for step, batch in self._handed if step >= since]", "for step, batch in self._handed if step > since]"),
        ("self.ahead = rest if rest", "self.ahead = None if rest"),
        ("rows = self._runners.interrupted() if self._interrupted else {}", "rows = {}"),
        ("elif self._process.poll() is not None:", "elif False:"),
        ("os.killpg(self._process.pid, signal.SIGKILL)", "self._process.kill()"),
        ("os.register_at_fork(after_in_child=connection.close)", "pass"),
    ],
)
TABLES["algorithm/divergence.py"] = (
    "divergence",
    [
        ("return jnp.any(flags, axis=1), jnp.argmax(flags, axis=1)", "return flags[:, 0], jnp.argmax(flags, axis=1)"),
        ("counted & (off > _TIMES_USUAL * usual)", "counted & (off > usual)"),
        (
            "jnp.maximum(quantile(off, counted, 0.9), least",
            "jnp.maximum(quantile(off, counted, 1.0), least",
        ),
    ],
)
TABLES["run/progress.py"] = (
    "divergence",
    [
        ("replays.with_rows(self.replay, places, replays.rows_at(self.replay, sources))", "self.replay"),
        ("replays.with_rows(self.replay, places, rows)", "self.replay"),
    ],
)
TABLES["run/run_state.py"] = ("task_rules", [('cut_after=about.get("cut_after")', "cut_after=None")])
