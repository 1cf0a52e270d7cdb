"""At home in other people's trainers. Nothing imports a plugin but the verb that was asked for it."""
